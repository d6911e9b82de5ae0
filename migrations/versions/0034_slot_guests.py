"""Sessions in the process of another one, for the parts of a slot's time that each is billed for"""

import sqlalchemy as sa
from alembic import op

revision = '0034'
down_revision = '0033'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'slot_guests',
        sa.Column('job_id', sa.String(40), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('host_id', sa.String(40), nullable=False),
        sa.Column('host_attempt', sa.Integer(), nullable=False),
        sa.Column('owner_id', sa.String(40), nullable=False),
        sa.Column('project_id', sa.String(40), nullable=False),
        sa.Column('began_at', sa.Float(), nullable=False),
        sa.Column('ended_at', sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name='fk_slot_guests_owner_id'),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name='fk_slot_guests_project_id'),
        sa.PrimaryKeyConstraint('job_id', 'attempt', name='pk_slot_guests'),
    )
    op.create_index('ix_slot_guests_host', 'slot_guests', ['host_id', 'host_attempt'])


def downgrade() -> None:
    op.drop_table('slot_guests')
