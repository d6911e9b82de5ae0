"""Plans: what `method: auto` came to, and the shapes of models"""

import sqlalchemy as sa
from alembic import op

revision = '0011'
down_revision = '0010'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.add_column('jobs', sa.Column('settled', sa.JSON(none_as_null=True), nullable=True))
    previews = sa.text("kind = 'preview'")
    op.create_index(
        'ix_jobs_previews', 'jobs', ['project_id', 'id'], sqlite_where=previews, postgresql_where=previews
    )
    op.create_table(
        'model_shapes',
        sa.Column('key', sa.String(length=64), nullable=False),
        sa.Column('shape', sa.JSON(none_as_null=True), nullable=False),
        sa.Column('at', sa.Float(), nullable=False),
        sa.PrimaryKeyConstraint('key', name=op.f('pk_model_shapes')),
    )


def downgrade() -> None:
    op.drop_table('model_shapes')
    op.drop_index('ix_jobs_previews', table_name='jobs')
    op.drop_column('jobs', 'settled')
