"""Sweeps: jobs that differ in some of their fields"""

import sqlalchemy as sa
from alembic import op

revision = '0021'
down_revision = '0020'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('jobs', sa.Column('sweep_id', sa.String(length=40), nullable=True))
    op.add_column('jobs', sa.Column('sweep_point', sa.JSON(), nullable=True))
    op.create_index(op.f('ix_jobs_sweep_id'), 'jobs', ['sweep_id'])
    op.create_table(
        'sweeps',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('name', sa.String(length=100), nullable=True),
        sa.Column('status', sa.String(length=16), nullable=False),
        sa.Column('reason', sa.Text(), nullable=False),
        sa.Column('spec', sa.JSON(), nullable=False),
        sa.Column('rungs', sa.JSON(), nullable=False),
        sa.Column('waiting', sa.JSON(), nullable=False),
        sa.Column('request_id', sa.String(length=64), nullable=True),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('finished_at', sa.Float(), nullable=True),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_sweeps_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_sweeps_project_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_sweeps')),
    )
    op.create_index(op.f('ix_sweeps_project_id_id'), 'sweeps', ['project_id', 'id'])
    running = sa.text("status = 'running'")
    op.create_index('ix_sweeps_running', 'sweeps', ['id'], sqlite_where=running, postgresql_where=running)


def downgrade() -> None:
    op.drop_table('sweeps')
    op.drop_index(op.f('ix_jobs_sweep_id'), 'jobs')
    for name in ('sweep_point', 'sweep_id'):
        op.drop_column('jobs', name)
