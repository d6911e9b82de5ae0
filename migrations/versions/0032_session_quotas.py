"""Quotas of sessions; how far the tensors of their operations have been removed"""

import sqlalchemy as sa
from alembic import op

revision = '0032'
down_revision = '0031'
branch_labels = None
depends_on = None

QUOTAS = {
    'max_sessions': sa.Integer(),
    'max_adapters': sa.Integer(),
    'session_hours_week': sa.Float(),
    'session_bytes': sa.BigInteger(),
}


def upgrade() -> None:
    for name, kind in QUOTAS.items():
        op.add_column('limits', sa.Column(name, kind, nullable=True))
    op.add_column('sessions', sa.Column('forgotten', sa.Integer(), nullable=False, server_default='0'))


def downgrade() -> None:
    op.drop_column('sessions', 'forgotten')
    for name in QUOTAS:
        op.drop_column('limits', name)
