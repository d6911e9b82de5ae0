"""What sessions have saved under names of their callers'"""

import sqlalchemy as sa
from alembic import op

revision = '0026'
down_revision = '0025'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'session_saves',
        sa.Column('session_id', sa.String(length=40), nullable=False),
        sa.Column('position', sa.Integer(), nullable=False),
        sa.Column('folder', sa.String(length=100), nullable=False),
        sa.Column('kind', sa.String(length=16), nullable=False),
        sa.Column('label', sa.String(length=100), nullable=False),
        sa.Column('about', sa.JSON(), nullable=False),
        sa.Column('expires_at', sa.Float(), nullable=True),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ['session_id', 'position'],
            ['session_operations.session_id', 'session_operations.position'],
            name=op.f('fk_session_saves_session_id'),
        ),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_session_saves_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_session_saves_project_id')),
        sa.PrimaryKeyConstraint('session_id', 'position', name=op.f('pk_session_saves')),
        sa.UniqueConstraint('session_id', 'folder', name=op.f('uq_session_saves_session_id_folder')),
    )
    op.create_index('ix_session_saves_project_id', 'session_saves', ['project_id', 'session_id'])


def downgrade() -> None:
    op.drop_table('session_saves')
