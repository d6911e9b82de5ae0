"""Nodes that are drained, by whom; jobs that lose their workers or find no room; an audit of what people did"""

import sqlalchemy as sa
from alembic import op

revision = '0002'
down_revision = '0001'
branch_labels = None
depends_on = None

COUNTERS = ('losses', 'full_disks', 'furthest_step')


def upgrade() -> None:
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
    op.create_index('ix_audit_target_id', 'audit', ['target', 'id'])
    op.create_index('ix_files_project_id_sha256', 'files', ['project_id', 'sha256'])
    op.add_column('nodes', sa.Column('drained_at', sa.Float(), nullable=True))
    op.add_column('nodes', sa.Column('drained_by', sa.String(length=40), nullable=True))
    op.add_column('nodes', sa.Column('drain_reason', sa.Text(), nullable=True))
    op.add_column('jobs', sa.Column('needs_bytes', sa.BigInteger(), nullable=True))
    for name in COUNTERS:
        op.add_column('jobs', sa.Column(name, sa.Integer(), nullable=False, server_default='0'))
        if op.get_bind().dialect.name != 'sqlite':  # which cannot take a default away, and does not mind it
            op.alter_column('jobs', name, server_default=None)


def downgrade() -> None:
    for name in (*reversed(COUNTERS), 'needs_bytes'):
        op.drop_column('jobs', name)
    for name in ('drain_reason', 'drained_by', 'drained_at'):
        op.drop_column('nodes', name)
    op.drop_index('ix_files_project_id_sha256', 'files')
    op.drop_table('audit')
