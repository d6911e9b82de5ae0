"""Roles of users in projects, admins of the box; scope, expiry, last use and rotation of keys; the audit names keys"""

import sqlalchemy as sa
from alembic import op

revision = '0005'
down_revision = '0004'
branch_labels = None
depends_on = None

KEY_COLUMNS = ('scope', 'expires_at', 'last_used_at', 'rotated_from', 'created_by')
FIRST_USER = (
    'SELECT users.id FROM users ORDER BY '
    'CASE WHEN EXISTS (SELECT 1 FROM api_keys WHERE owner_id = users.id AND revoked_at IS NULL) THEN 0 ELSE 1 END, '
    'users.created_at, users.id LIMIT 1'
)


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == 'sqlite'  # it cannot take a default away, and does not mind it
    op.add_column('users', sa.Column('box_admin', sa.Boolean(), nullable=False, server_default=sa.false()))
    op.add_column('users', sa.Column('disabled_at', sa.Float(), nullable=True))
    op.add_column('api_keys', sa.Column('scope', sa.String(length=8), nullable=False, server_default='admin'))
    if not sqlite:
        op.alter_column('users', 'box_admin', server_default=None)
        op.alter_column('api_keys', 'scope', server_default=None)
    op.add_column('api_keys', sa.Column('expires_at', sa.Float(), nullable=True))
    op.add_column('api_keys', sa.Column('last_used_at', sa.Float(), nullable=True))
    op.add_column('api_keys', sa.Column('rotated_from', sa.String(length=40), nullable=True))
    op.add_column('api_keys', sa.Column('created_by', sa.String(length=40), nullable=True))
    op.create_index('ix_api_keys_project_id_owner_id', 'api_keys', ['project_id', 'owner_id'])
    op.create_table('memberships',
    sa.Column('user_id', sa.String(length=40), nullable=False),
    sa.Column('project_id', sa.String(length=40), nullable=False),
    sa.Column('role', sa.String(length=16), nullable=False),
    sa.Column('created_at', sa.Float(), nullable=False),
    sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_memberships_user_id')),
    sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_memberships_project_id')),
    sa.PrimaryKeyConstraint('user_id', 'project_id', name=op.f('pk_memberships'))
    )
    op.create_index('ix_memberships_project_id', 'memberships', ['project_id'])

    # Nobody loses anything: until now each key could do everything in its project, and drain nodes.
    op.execute(
        "INSERT INTO memberships (user_id, project_id, role, created_at) "
        "SELECT owner_id, project_id, 'admin', min(created_at) FROM ("
        "SELECT owner_id, project_id, created_at FROM api_keys "
        "UNION ALL SELECT owner_id, project_id, created_at FROM jobs "
        "UNION ALL SELECT owner_id, project_id, created_at FROM files) AS seen GROUP BY owner_id, project_id"
    )
    op.execute(f"UPDATE api_keys SET scope = 'box' WHERE owner_id = ({FIRST_USER})")
    op.execute(f'UPDATE users SET box_admin = {"1" if sqlite else "true"} WHERE id = ({FIRST_USER})')

    op.execute('CREATE TABLE audit_before AS SELECT * FROM audit')
    op.drop_table('audit')
    op.create_table('audit',
    sa.Column('id', sa.String(length=40), nullable=False),
    sa.Column('time', sa.Float(), nullable=False),
    sa.Column('action', sa.String(length=64), nullable=False),
    sa.Column('target', sa.String(length=255), nullable=False),
    sa.Column('actor_id', sa.String(length=40), nullable=True),
    sa.Column('key_id', sa.String(length=40), nullable=True),
    sa.Column('project_id', sa.String(length=40), nullable=True),
    sa.Column('request_id', sa.String(length=64), nullable=True),
    sa.Column('data', sa.JSON(none_as_null=True), nullable=False),
    sa.ForeignKeyConstraint(['actor_id'], ['users.id'], name=op.f('fk_audit_actor_id')),
    sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_audit_project_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_audit'))
    )
    op.execute(
        'INSERT INTO audit (id, time, action, target, actor_id, project_id, request_id, data) '
        # Until now it told of nodes alone, which belong to no project.
        'SELECT id, time, action, target, owner_id, NULL, request_id, data FROM audit_before'
    )
    op.drop_table('audit_before')
    for columns in (['target', 'id'], ['project_id', 'id'], ['actor_id', 'id']):
        op.create_index(f'ix_audit_{"_".join(columns)}', 'audit', columns)


def downgrade() -> None:
    sqlite = op.get_bind().dialect.name == 'sqlite'
    # An older version takes every key for one that may do everything: those that may not must not come through.
    now = "((julianday('now') - 2440587.5) * 86400.0)" if sqlite else 'extract(epoch from clock_timestamp())'
    op.execute(
        f'UPDATE api_keys SET revoked_at = {now} WHERE revoked_at IS NULL AND ('
        "scope = 'read' OR expires_at IS NOT NULL "
        'OR EXISTS (SELECT 1 FROM users WHERE users.id = owner_id AND disabled_at IS NOT NULL) '
        'OR NOT EXISTS (SELECT 1 FROM memberships WHERE memberships.user_id = owner_id '
        "AND memberships.project_id = api_keys.project_id AND role IN ('member', 'admin')))"
    )
    op.execute('CREATE TABLE audit_after AS SELECT * FROM audit')
    op.drop_table('audit')
    op.create_table('audit',
    sa.Column('id', sa.String(length=40), nullable=False),
    sa.Column('time', sa.Float(), nullable=False),
    sa.Column('action', sa.String(length=64), nullable=False),
    sa.Column('target', sa.String(length=255), nullable=False),
    sa.Column('request_id', sa.String(length=64), nullable=True),
    sa.Column('data', sa.JSON(none_as_null=True), nullable=False),
    sa.Column('owner_id', sa.String(length=40), nullable=False),
    sa.Column('project_id', sa.String(length=40), nullable=False),
    sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_audit_owner_id')),
    sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_audit_project_id')),
    sa.PrimaryKeyConstraint('id', name=op.f('pk_audit'))
    )
    # What has no user cannot stand there; what has no project gets one of its user's.
    op.execute(
        'INSERT INTO audit (id, time, action, target, request_id, data, owner_id, project_id) '
        'SELECT id, time, action, target, request_id, data, actor_id, project_id FROM ('
        'SELECT id, time, action, target, request_id, data, actor_id, coalesce(project_id, '
        '(SELECT min(memberships.project_id) FROM memberships WHERE memberships.user_id = actor_id)) AS project_id '
        'FROM audit_after) AS told WHERE actor_id IS NOT NULL AND project_id IS NOT NULL'
    )
    op.drop_table('audit_after')
    op.create_index('ix_audit_target_id', 'audit', ['target', 'id'])
    op.drop_table('memberships')
    op.drop_index('ix_api_keys_project_id_owner_id', 'api_keys')
    for name in KEY_COLUMNS:
        op.drop_column('api_keys', name)
    for name in ('disabled_at', 'box_admin'):
        op.drop_column('users', name)
