"""Keys: with which key each was made, and what it may do with keys"""

import sqlalchemy as sa
from alembic import op

from core.db.engine import db_now

revision = '0013'
down_revision = '0012'
branch_labels = None
depends_on = None

ALL = {'self_rotate', 'make_keys'}


def upgrade() -> None:
    op.add_column('api_keys', sa.Column('made_with', sa.String(length=40), nullable=True))
    op.add_column('api_keys', sa.Column('rights', sa.JSON(none_as_null=True), nullable=True))
    op.create_index('ix_api_keys_made_with', 'api_keys', ['made_with'])
    op.create_index('ix_api_keys_rotated_from', 'api_keys', ['rotated_from'])


def downgrade() -> None:
    """Revokes keys that the version before would take for more than they are."""
    keys = sa.table(
        'api_keys', sa.column('id', sa.String), sa.column('rights', sa.JSON), sa.column('revoked_at', sa.Float)
    )
    bind = op.get_bind()
    found = bind.execute(sa.select(keys.c.id, keys.c.rights).where(keys.c.revoked_at.is_(None))).all()
    narrow = [row.id for row in found if row.rights is not None and set(row.rights) != ALL]
    for key_id in narrow:
        bind.execute(keys.update().where(keys.c.id == key_id).values(revoked_at=db_now()))
    op.drop_index('ix_api_keys_rotated_from', table_name='api_keys')
    op.drop_index('ix_api_keys_made_with', table_name='api_keys')
    op.drop_column('api_keys', 'rights')
    op.drop_column('api_keys', 'made_with')
