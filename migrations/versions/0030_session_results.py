"""Results of sessions are found by their age"""

import sqlalchemy as sa
from alembic import op

revision = '0030'
down_revision = '0029'
branch_labels = None
depends_on = None

KEPT = 'result_bytes > 0'


def upgrade() -> None:
    op.create_index(
        'ix_session_operations_kept',
        'session_operations',
        ['done_at'],
        sqlite_where=sa.text(KEPT),
        postgresql_where=sa.text(KEPT),
    )


def downgrade() -> None:
    op.drop_index('ix_session_operations_kept', 'session_operations')
