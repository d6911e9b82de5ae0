"""Lines of exports that are asked for after the training"""

import sqlalchemy as sa
from alembic import op

revision = '0022'
down_revision = '0021'
branch_labels = None
depends_on = None


def upgrade() -> None:
    waits = sa.text("status = 'queued' AND kind = 'export'")
    columns = ['queue_key', 'created_at', 'id']
    op.create_index('ix_jobs_waits_export', 'jobs', columns, sqlite_where=waits, postgresql_where=waits)
    exports = sa.text("kind = 'export'")
    op.create_index('ix_jobs_exports', 'jobs', ['project_id', 'id'], sqlite_where=exports, postgresql_where=exports)


def downgrade() -> None:
    op.drop_index('ix_jobs_exports', 'jobs')
    op.drop_index('ix_jobs_waits_export', 'jobs')
