"""Which versions may use the database; what the data root holds, by kind"""

import sqlalchemy as sa
from alembic import op

revision = '0009'
down_revision = '0008'
branch_labels = None
depends_on = None

works_from = '0009'
"""The first version that knows how to ask (core/db/migrate.py)."""


def upgrade() -> None:
    op.create_table(
        'schema_floor',
        sa.Column('id', sa.String(length=8), nullable=False),
        sa.Column('works_from', sa.String(length=32), nullable=False),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_schema_floor')),
    )
    op.create_table(
        'disk_usage',
        sa.Column('kind', sa.String(length=16), nullable=False),
        sa.Column('bytes', sa.BigInteger(), nullable=False),
        sa.Column('at', sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint('kind', name=op.f('pk_disk_usage')),
    )


def downgrade() -> None:
    op.drop_table('disk_usage')
    op.drop_table('schema_floor')
