"""Reward models that jobs have trained, as other jobs are pinned to them"""

import sqlalchemy as sa
from alembic import op

revision = '0027'
down_revision = '0026'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('jobs', sa.Column('reward_models', sa.JSON(), nullable=True))


def downgrade() -> None:
    op.drop_column('jobs', 'reward_models')
