"""Tags, notes and the archive of jobs"""

import sqlalchemy as sa
from alembic import op

revision = '0017'
down_revision = '0016'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('jobs', sa.Column('tags', sa.JSON(), nullable=False, server_default='[]'))
    op.add_column('jobs', sa.Column('note', sa.Text(), nullable=True))
    op.add_column('jobs', sa.Column('archived_at', sa.Float(), nullable=True))


def downgrade() -> None:
    for name in ('archived_at', 'note', 'tags'):
        op.drop_column('jobs', name)
