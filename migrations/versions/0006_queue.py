"""The order of the queue: priorities, usage, shares and quotas; holds on slots, maintenance, labels of nodes"""

import sqlalchemy as sa
from alembic import op

revision = '0006'
down_revision = '0005'
branch_labels = None
depends_on = None

WAITS_FOR = {
    'prepare': "status = 'queued' AND kind = 'train' AND prepared IS NULL",
    'train': "status = 'queued' AND kind = 'train' AND prepared IS NOT NULL",
    'preview': "status = 'queued' AND kind = 'preview'",
}
ACTIVE = 'released_at IS NULL'
UNCHARGED = 'charged_at IS NULL'
IS_GPU = "slot <> 'cpu' AND slot NOT LIKE 'cpu-%' AND slot NOT LIKE 'prepare-%' AND slot NOT LIKE 'preview-%'"
IS_CPU = "(slot = 'cpu' OR slot LIKE 'cpu-%')"


def owned():
    return (
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
    )


def owned_keys(table):
    return (
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f(f'fk_{table}_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f(f'fk_{table}_project_id')),
    )


def upgrade() -> None:
    sqlite = op.get_bind().dialect.name == 'sqlite'  # which cannot take a default away, and does not mind it

    def add(table, column):
        op.add_column(table, column)
        if not sqlite and column.server_default is not None:
            op.alter_column(table, column.name, server_default=None)

    add('jobs', sa.Column('priority', sa.Integer(), nullable=False, server_default='0'))
    add('jobs', sa.Column('queue_key', sa.String(length=1024), nullable=False, server_default=''))
    op.execute("UPDATE jobs SET queue_key = accelerator || '|' || project_id || '|' || owner_id || '|100'")
    for what, waits in WAITS_FOR.items():
        op.create_index(
            f'ix_jobs_waits_{what}',
            'jobs',
            ['queue_key', 'created_at', 'id'],
            sqlite_where=sa.text(waits),
            postgresql_where=sa.text(waits),
        )
    add('allocations', sa.Column('gpus', sa.Integer(), nullable=False, server_default='0'))
    add('allocations', sa.Column('billing', sa.Float(), nullable=False, server_default='0'))
    add('allocations', sa.Column('charged_at', sa.Float(), nullable=True))
    op.execute(f'UPDATE allocations SET gpus = 1, billing = 1.0 WHERE {IS_GPU}')
    op.execute(f'UPDATE allocations SET billing = 0.1 WHERE {IS_CPU}')
    op.execute('UPDATE allocations SET charged_at = released_at WHERE billing = 0')
    op.create_index(
        'ix_allocations_uncharged',
        'allocations',
        ['job_id', 'attempt'],
        sqlite_where=sa.text(UNCHARGED),
        postgresql_where=sa.text(UNCHARGED),
    )
    op.create_index('ix_allocations_history', 'allocations', ['node', 'slot', 'created_at'])
    add('nodes', sa.Column('labels', sa.JSON(none_as_null=True), nullable=False, server_default='[]'))
    op.create_table(
        'usage',
        *owned(),
        sa.Column('billed', sa.Float(), nullable=False),
        sa.Column('at', sa.Float(), nullable=False),
        sa.Column('disk_bytes', sa.BigInteger(), nullable=False),
        sa.Column('disk_at', sa.Float(), nullable=True),
        *owned_keys('usage'),
        sa.PrimaryKeyConstraint('owner_id', 'project_id', name=op.f('pk_usage')),
    )
    op.create_table(
        'usage_days',
        sa.Column('day', sa.Integer(), nullable=False),
        *owned(),
        sa.Column('gpu_seconds', sa.Float(), nullable=False),
        sa.Column('cpu_seconds', sa.Float(), nullable=False),
        *owned_keys('usage_days'),
        sa.PrimaryKeyConstraint('day', 'owner_id', 'project_id', name=op.f('pk_usage_days')),
    )
    op.create_table(
        'limits',
        sa.Column('scope', sa.String(length=8), nullable=False),
        sa.Column('subject_id', sa.String(length=40), nullable=False),
        sa.Column('shares', sa.Float(), nullable=True),
        sa.Column('max_priority', sa.Integer(), nullable=True),
        sa.Column('max_running', sa.Integer(), nullable=True),
        sa.Column('max_queued', sa.Integer(), nullable=True),
        sa.Column('gpu_hours_week', sa.Float(), nullable=True),
        sa.Column('disk_bytes', sa.BigInteger(), nullable=True),
        sa.PrimaryKeyConstraint('scope', 'subject_id', name=op.f('pk_limits')),
    )
    op.create_table(
        'holds',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('node', sa.String(length=255), nullable=False),
        sa.Column('slot', sa.String(length=128), nullable=False),
        sa.Column('kind', sa.String(length=8), nullable=False),
        sa.Column('held_for', sa.String(length=100), nullable=False),
        sa.Column('why', sa.Text(), nullable=False),
        sa.Column('user_id', sa.String(length=40), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('until', sa.Float(), nullable=True),
        sa.Column('released_at', sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_holds_user_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_holds')),
    )
    op.create_index(
        'uq_holds_active',
        'holds',
        ['node', 'slot'],
        unique=True,
        sqlite_where=sa.text(ACTIVE),
        postgresql_where=sa.text(ACTIVE),
    )
    op.create_index('ix_holds_history', 'holds', ['node', 'slot', 'created_at'])
    op.create_table(
        'maintenance',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('node', sa.String(length=255), nullable=True),
        sa.Column('starts_at', sa.Float(), nullable=False),
        sa.Column('ends_at', sa.Float(), nullable=False),
        sa.Column('why', sa.Text(), nullable=False),
        sa.Column('user_id', sa.String(length=40), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('cancelled_at', sa.Float(), nullable=True),
        sa.ForeignKeyConstraint(['user_id'], ['users.id'], name=op.f('fk_maintenance_user_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_maintenance')),
    )
    op.create_index('ix_maintenance_ends_at', 'maintenance', ['ends_at'])


def downgrade() -> None:
    for table in ('maintenance', 'holds', 'limits', 'usage_days', 'usage'):
        op.drop_table(table)
    op.drop_column('nodes', 'labels')
    op.drop_index('ix_allocations_history', 'allocations')
    op.drop_index('ix_allocations_uncharged', 'allocations')
    for name in ('charged_at', 'billing', 'gpus'):
        op.drop_column('allocations', name)
    for what in WAITS_FOR:
        op.drop_index(f'ix_jobs_waits_{what}', 'jobs')
    op.drop_column('jobs', 'queue_key')
    op.drop_column('jobs', 'priority')
