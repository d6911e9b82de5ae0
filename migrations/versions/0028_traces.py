"""When the trace of a job was sent to a collector"""

import sqlalchemy as sa
from alembic import op

revision = '0028'
down_revision = '0027'
branch_labels = None
depends_on = None

UNTRACED = 'finished_at IS NOT NULL AND traced_at IS NULL'


def upgrade() -> None:
    op.add_column('jobs', sa.Column('traced_at', sa.Float(), nullable=True))
    op.create_index(
        'ix_jobs_untraced',
        'jobs',
        ['finished_at', 'id'],
        sqlite_where=sa.text(UNTRACED),
        postgresql_where=sa.text(UNTRACED),
    )


def downgrade() -> None:
    op.drop_index('ix_jobs_untraced', 'jobs')
    op.drop_column('jobs', 'traced_at')
