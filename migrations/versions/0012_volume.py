"""Bounds of what a project leaves in the database: bytes of specs, jobs that wait, previews"""

import sqlalchemy as sa
from alembic import op

revision = '0012'
down_revision = '0011'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('projects', sa.Column('spec_bytes', sa.BigInteger(), nullable=False, server_default='0'))
    op.add_column('limits', sa.Column('max_previews', sa.Integer(), nullable=True))
    queued = sa.text("status = 'queued'")
    op.create_index(
        'ix_jobs_waiting', 'jobs', ['project_id', 'kind'], sqlite_where=queued, postgresql_where=queued
    )
    # JSON is stored as text on both databases, in ASCII.
    op.execute(
        'UPDATE projects SET spec_bytes = coalesce('
        '(SELECT sum(length(CAST(jobs.spec AS TEXT))) FROM jobs WHERE jobs.project_id = projects.id), 0)'
    )


def downgrade() -> None:
    op.drop_index('ix_jobs_waiting', table_name='jobs')
    op.drop_column('limits', 'max_previews')
    op.drop_column('projects', 'spec_bytes')
