"""Trials of rewards: rows of `jobs` that answer prompts with the untrained model"""

import sqlalchemy as sa
from alembic import op

revision = '0025'
down_revision = '0024'
branch_labels = None
depends_on = None

KINDS = "kind IN ('train', 'session', 'serving')"
OLD = {
    'prepare': f"status = 'queued' AND unmet = 0 AND {KINDS} AND prepared IS NULL",
    'train': f"status = 'queued' AND unmet = 0 AND {KINDS} AND prepared IS NOT NULL",
    'bounded': f"status = 'queued' AND unmet = 0 AND {KINDS} AND prepared IS NOT NULL AND bound_seconds IS NOT NULL",
}
NEW = {what: where.replace(KINDS, "kind IN ('train', 'session', 'serving', 'trial')") for what, where in OLD.items()}


def upgrade() -> None:
    _lines(NEW)
    trials = sa.text("kind = 'trial'")
    op.create_index('ix_jobs_trials', 'jobs', ['project_id', 'id'], sqlite_where=trials, postgresql_where=trials)


def downgrade() -> None:
    op.drop_index('ix_jobs_trials', 'jobs')
    _lines(OLD)


def _lines(where: dict[str, str]) -> None:
    for what, words in where.items():
        op.drop_index(f'ix_jobs_waits_{what}', 'jobs')
        lines = sa.text(words)
        columns = ['queue_key', 'created_at', 'id']
        op.create_index(f'ix_jobs_waits_{what}', 'jobs', columns, sqlite_where=lines, postgresql_where=lines)
