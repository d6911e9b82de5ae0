"""Jobs that wait for the end of others"""

import sqlalchemy as sa
from alembic import op

revision = '0019'
down_revision = '0018'
branch_labels = None
depends_on = None

OLD = {
    'prepare': "status = 'queued' AND kind = 'train' AND prepared IS NULL",
    'train': "status = 'queued' AND kind = 'train' AND prepared IS NOT NULL",
    'bounded': "status = 'queued' AND kind = 'train' AND prepared IS NOT NULL AND bound_seconds IS NOT NULL",
}
NEW = {what: where.replace(" AND kind", " AND unmet = 0 AND kind", 1) for what, where in OLD.items()}


def upgrade() -> None:
    op.add_column('jobs', sa.Column('unmet', sa.Integer(), nullable=False, server_default='0'))
    _lines(NEW)
    waiting = sa.text("unmet > 0 AND status IN ('queued', 'paused')")
    op.create_index('ix_jobs_after', 'jobs', ['id'], sqlite_where=waiting, postgresql_where=waiting)
    op.create_table(
        'job_dependencies',
        sa.Column('job_id', sa.String(length=40), nullable=False),
        sa.Column('after_id', sa.String(length=40), nullable=False),
        sa.Column('on', sa.String(length=16), nullable=False),
        sa.Column('met_at', sa.Float(), nullable=True),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['job_id'], ['jobs.id'], name=op.f('fk_job_dependencies_job_id')),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_job_dependencies_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_job_dependencies_project_id')),
        sa.PrimaryKeyConstraint('job_id', 'after_id', name=op.f('pk_job_dependencies')),
    )
    op.create_index(op.f('ix_job_dependencies_after_id'), 'job_dependencies', ['after_id'])


def downgrade() -> None:
    op.drop_table('job_dependencies')
    op.drop_index('ix_jobs_after', 'jobs')
    _lines(OLD)
    op.drop_column('jobs', 'unmet')


def _lines(where: dict[str, str]) -> None:
    for what, words in where.items():
        op.drop_index(f'ix_jobs_waits_{what}', 'jobs')
        lines = sa.text(words)
        columns = ['queue_key', 'created_at', 'id']
        op.create_index(f'ix_jobs_waits_{what}', 'jobs', columns, sqlite_where=lines, postgresql_where=lines)
