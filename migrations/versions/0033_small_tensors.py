"""Small tensors of a session's operations lie in their rows"""

import sqlalchemy as sa
from alembic import op

revision = '0033'
down_revision = '0032'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('session_operations', sa.Column('tensors', sa.LargeBinary(), nullable=True))


def downgrade() -> None:
    op.drop_column('session_operations', 'tensors')
