"""Previews: rows of `jobs` that render a file and train nothing"""

import sqlalchemy as sa
from alembic import op

revision = '0003'
down_revision = '0002'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('jobs', sa.Column('kind', sa.String(length=16), nullable=False, server_default='train'))
    if op.get_bind().dialect.name != 'sqlite':  # which cannot take a default away, and does not mind it
        op.alter_column('jobs', 'kind', server_default=None)


def downgrade() -> None:
    # Rows that an older version would take for jobs to train, and all that hangs on them.
    previews = "SELECT id FROM jobs WHERE kind = 'preview'"
    for table in ('events', 'metrics', 'artifacts', 'allocations', 'attempts'):
        op.execute(f'DELETE FROM {table} WHERE job_id IN ({previews})')
    op.execute(f'DELETE FROM outbox WHERE job_id IN ({previews})')
    op.execute("DELETE FROM jobs WHERE kind = 'preview'")
    op.drop_column('jobs', 'kind')
