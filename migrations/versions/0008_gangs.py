"""Jobs of several GPUs: a row of allocations per slot, slots that are kept, bounds on the time; preemption"""

import sqlalchemy as sa
from alembic import op

revision = '0008'
down_revision = '0007'
branch_labels = None
depends_on = None

BOUNDED = "status = 'queued' AND kind = 'train' AND prepared IS NOT NULL AND bound_seconds IS NOT NULL"
ACTIVE = 'released_at IS NULL'
UNCHARGED = 'charged_at IS NULL'
COLUMNS = (
    'job_id, attempt, node, slot, created_at, released_at, gpus, billing, charged_at, owner_id, project_id'
)


def upgrade() -> None:
    for name, kind in (
        ('progress_at', sa.Float()),
        ('bound_seconds', sa.Float()),
        ('reserved_at', sa.Float()),
        ('reserved_node', sa.String(length=255)),
        ('preempted', sa.JSON(none_as_null=True)),
    ):
        op.add_column('jobs', sa.Column(name, kind, nullable=True))
    op.add_column('attempts', sa.Column('training_at', sa.Float(), nullable=True))
    op.add_column('limits', sa.Column('preemptible', sa.Boolean(), nullable=True))
    # What waits or is paused and has a limit; what it has used of it already only makes the bound wider than need be.
    limit = "json_extract(spec, '$.resources.max_runtime_seconds')"
    if not _sqlite():
        limit = "CAST(spec -> 'resources' ->> 'max_runtime_seconds' AS DOUBLE PRECISION)"
    op.execute(f"UPDATE jobs SET bound_seconds = {limit} WHERE status IN ('queued', 'preparing', 'paused')")
    op.create_index(
        'ix_jobs_waits_bounded',
        'jobs',
        ['queue_key', 'created_at', 'id'],
        sqlite_where=sa.text(BOUNDED),
        postgresql_where=sa.text(BOUNDED),
    )
    _key_of_allocations('job_id', 'attempt', 'node', 'slot')


def downgrade() -> None:
    # One row an attempt again: the first slot's has the figures of all; the others are freed with it.
    others = (
        'FROM allocations a WHERE a.job_id = allocations.job_id AND a.attempt = allocations.attempt'
        ' AND (a.node, a.slot) < (allocations.node, allocations.slot)'
    )
    op.execute(
        'UPDATE allocations SET'
        ' gpus = (SELECT sum(a.gpus) FROM allocations a'
        '  WHERE a.job_id = allocations.job_id AND a.attempt = allocations.attempt),'
        ' billing = (SELECT sum(a.billing) FROM allocations a'
        '  WHERE a.job_id = allocations.job_id AND a.attempt = allocations.attempt)'
        f' WHERE NOT EXISTS (SELECT 1 {others})'
    )
    op.execute(f'DELETE FROM allocations WHERE EXISTS (SELECT 1 {others})')
    _key_of_allocations('job_id', 'attempt')
    op.drop_index('ix_jobs_waits_bounded', 'jobs')
    op.drop_column('limits', 'preemptible')
    op.drop_column('attempts', 'training_at')
    for name in ('preempted', 'reserved_node', 'reserved_at', 'bound_seconds', 'progress_at'):
        op.drop_column('jobs', name)


def _sqlite() -> bool:
    return op.get_bind().dialect.name == 'sqlite'


def _key_of_allocations(*key: str) -> None:
    """SQLite cannot change a primary key: the table is made anew."""
    if not _sqlite():
        op.drop_constraint('pk_allocations', 'allocations', type_='primary')
        op.create_primary_key('pk_allocations', 'allocations', list(key))
        return
    op.create_table(
        'allocations_new',
        sa.Column('job_id', sa.String(length=40), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('node', sa.String(length=255), nullable=False),
        sa.Column('slot', sa.String(length=128), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('released_at', sa.Float(), nullable=True),
        sa.Column('gpus', sa.Integer(), nullable=False),
        sa.Column('billing', sa.Float(), nullable=False),
        sa.Column('charged_at', sa.Float(), nullable=True),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['job_id'], ['jobs.id'], name=op.f('fk_allocations_job_id')),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_allocations_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_allocations_project_id')),
        sa.PrimaryKeyConstraint(*key, name=op.f('pk_allocations')),
    )
    op.execute(f'INSERT INTO allocations_new ({COLUMNS}) SELECT {COLUMNS} FROM allocations')
    op.drop_table('allocations')
    op.rename_table('allocations_new', 'allocations')
    op.create_index(
        'uq_allocations_active', 'allocations', ['node', 'slot'], unique=True, sqlite_where=sa.text(ACTIVE)
    )
    op.create_index(
        'ix_allocations_uncharged', 'allocations', ['job_id', 'attempt'], sqlite_where=sa.text(UNCHARGED)
    )
    op.create_index('ix_allocations_history', 'allocations', ['node', 'slot', 'created_at'])
