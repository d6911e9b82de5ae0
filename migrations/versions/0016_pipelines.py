"""Jobs that start from other jobs, and pipelines of them"""

import sqlalchemy as sa
from alembic import op

revision = '0016'
down_revision = '0015'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('jobs', sa.Column('chain', sa.JSON(), nullable=True))
    op.add_column('jobs', sa.Column('lineage', sa.JSON(), nullable=True))
    op.add_column('jobs', sa.Column('pipeline_id', sa.String(length=40), nullable=True))
    op.create_index(op.f('ix_jobs_pipeline_id'), 'jobs', ['pipeline_id'])
    op.create_table(
        'pipelines',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('name', sa.String(length=100), nullable=True),
        sa.Column('status', sa.String(length=16), nullable=False),
        sa.Column('reason', sa.Text(), nullable=False),
        sa.Column('request_id', sa.String(length=64), nullable=True),
        sa.Column('retry_of', sa.String(length=40), nullable=True),
        sa.Column('notify', sa.JSON(), nullable=False),
        sa.Column('event_seq', sa.Integer(), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('finished_at', sa.Float(), nullable=True),
        *_owned('pipelines'),
        sa.ForeignKeyConstraint(['retry_of'], ['pipelines.id'], name=op.f('fk_pipelines_retry_of')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_pipelines')),
    )
    op.create_index(op.f('ix_pipelines_project_id_id'), 'pipelines', ['project_id', 'id'])
    op.create_index(op.f('ix_pipelines_retry_of'), 'pipelines', ['retry_of'])
    running = sa.text("status = 'running'")
    op.create_index('ix_pipelines_running', 'pipelines', ['id'], sqlite_where=running, postgresql_where=running)
    op.create_table(
        'pipeline_steps',
        sa.Column('pipeline_id', sa.String(length=40), nullable=False),
        sa.Column('number', sa.Integer(), nullable=False),
        sa.Column('name', sa.String(length=100), nullable=False),
        sa.Column('spec', sa.JSON(), nullable=False),
        sa.Column('gates', sa.JSON(), nullable=False),
        sa.Column('job_id', sa.String(length=40), nullable=True),
        sa.Column('retries', sa.String(length=40), nullable=True),
        sa.Column('passed', sa.JSON(), nullable=True),
        *_owned('pipeline_steps'),
        sa.ForeignKeyConstraint(['pipeline_id'], ['pipelines.id'], name=op.f('fk_pipeline_steps_pipeline_id')),
        sa.PrimaryKeyConstraint('pipeline_id', 'number', name=op.f('pk_pipeline_steps')),
    )
    op.create_index(op.f('ix_pipeline_steps_job_id'), 'pipeline_steps', ['job_id'])
    op.create_table(
        'pipeline_events',
        sa.Column('pipeline_id', sa.String(length=40), nullable=False),
        sa.Column('seq', sa.Integer(), nullable=False),
        sa.Column('type', sa.String(length=32), nullable=False),
        sa.Column('time', sa.Float(), nullable=False),
        sa.Column('data', sa.JSON(), nullable=False),
        *_owned('pipeline_events'),
        sa.ForeignKeyConstraint(['pipeline_id'], ['pipelines.id'], name=op.f('fk_pipeline_events_pipeline_id')),
        sa.PrimaryKeyConstraint('pipeline_id', 'seq', name=op.f('pk_pipeline_events')),
    )


def _owned(table: str) -> list[sa.Column[str] | sa.ForeignKeyConstraint]:
    return [
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f(f'fk_{table}_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f(f'fk_{table}_project_id')),
    ]


def downgrade() -> None:
    op.drop_table('pipeline_events')
    op.drop_table('pipeline_steps')
    op.drop_table('pipelines')
    op.drop_index(op.f('ix_jobs_pipeline_id'), 'jobs')
    for name in ('pipeline_id', 'lineage', 'chain'):
        op.drop_column('jobs', name)
