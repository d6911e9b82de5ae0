"""How many jobs were deleted, so that metrics do not go down"""

import sqlalchemy as sa
from alembic import op

revision = '0014'
down_revision = '0013'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'deleted_jobs',
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.Column('status', sa.String(length=16), nullable=False),
        sa.Column('bucket', sa.Integer(), nullable=False),
        sa.Column('jobs', sa.Integer(), nullable=False),
        sa.Column('waited', sa.Float(), nullable=False),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_deleted_jobs_project_id')),
        sa.PrimaryKeyConstraint('project_id', 'status', 'bucket', name=op.f('pk_deleted_jobs')),
    )


def downgrade() -> None:
    op.drop_table('deleted_jobs')
