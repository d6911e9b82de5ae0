"""Saved weights that other projects may read, and those that are encrypted for their readers"""

import sqlalchemy as sa
from alembic import op

revision = '0029'
down_revision = '0028'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('session_saves', sa.Column('published_at', sa.Float(), nullable=True))
    op.add_column('session_saves', sa.Column('recipients', sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column('session_saves', 'recipients')
    op.drop_column('session_saves', 'published_at')
