"""Sessions of browsers, beside the keys"""

import sqlalchemy as sa
from alembic import op

revision = '0020'
down_revision = '0019'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('api_keys', sa.Column('session_until', sa.Float(), nullable=True))


def downgrade() -> None:
    op.drop_column('api_keys', 'session_until')
