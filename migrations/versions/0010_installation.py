"""The installation: which data root is its own, and what its API writes into jobs"""

import sqlalchemy as sa
from alembic import op

from core.db.engine import db_now
from core.ids import new_id

revision = '0010'
down_revision = '0009'
branch_labels = None
depends_on = None


def upgrade() -> None:
    table = op.create_table(
        'installation',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('mark', sa.String(length=64), nullable=True),
        sa.Column('marked_at', sa.Float(), nullable=True),
        sa.Column('marked_by', sa.Text(), nullable=True),
        sa.Column('version', sa.String(length=32), nullable=True),
        sa.Column('words', sa.JSON(none_as_null=True), nullable=True),
        sa.Column('words_sha256', sa.String(length=64), nullable=True),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_installation')),
    )
    op.execute(table.insert().values(id=new_id('inst'), created_at=db_now()))


def downgrade() -> None:
    op.drop_table('installation')
