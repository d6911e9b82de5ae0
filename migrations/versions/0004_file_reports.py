"""What the check of an upload found: container, columns, notices"""

import sqlalchemy as sa
from alembic import op

revision = '0004'
down_revision = '0003'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('files', sa.Column('report', sa.JSON(none_as_null=True), nullable=True))


def downgrade() -> None:
    op.drop_column('files', 'report')
