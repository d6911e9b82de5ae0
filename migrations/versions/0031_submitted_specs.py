"""The spec of a job as it was sent"""

import sqlalchemy as sa
from alembic import op

revision = '0031'
down_revision = '0030'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('jobs', sa.Column('submitted', sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column('jobs', 'submitted')
