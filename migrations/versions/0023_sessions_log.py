"""Sessions and the log of their operations"""

import sqlalchemy as sa
from alembic import op

revision = '0023'
down_revision = '0022'
branch_labels = None
depends_on = None

OLD = {
    'prepare': "status = 'queued' AND unmet = 0 AND kind = 'train' AND prepared IS NULL",
    'train': "status = 'queued' AND unmet = 0 AND kind = 'train' AND prepared IS NOT NULL",
    'bounded': "status = 'queued' AND unmet = 0 AND kind = 'train' AND prepared IS NOT NULL "
    "AND bound_seconds IS NOT NULL",
}
NEW = {what: where.replace("kind = 'train'", "kind IN ('train', 'session')") for what, where in OLD.items()}


def upgrade() -> None:
    _lines(NEW)
    op.create_table(
        'sessions',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('spec', sa.JSON(), nullable=False),
        sa.Column('positions', sa.Integer(), nullable=False),
        sa.Column('snapshot', sa.Integer(), nullable=False),
        sa.Column('log_bytes', sa.BigInteger(), nullable=False),
        sa.Column('used_at', sa.Float(), nullable=False),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['id'], ['jobs.id'], name=op.f('fk_sessions_id')),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_sessions_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_sessions_project_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_sessions')),
    )
    op.create_table(
        'session_operations',
        sa.Column('session_id', sa.String(length=40), nullable=False),
        sa.Column('position', sa.Integer(), nullable=False),
        sa.Column('model', sa.String(length=64), nullable=False),
        sa.Column('seq', sa.Integer(), nullable=False),
        sa.Column('operation', sa.JSON(), nullable=False),
        sa.Column('sha256', sa.String(length=64), nullable=False),
        sa.Column('tensor_bytes', sa.BigInteger(), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('done_at', sa.Float(), nullable=True),
        sa.Column('result', sa.JSON(), nullable=True),
        sa.Column('error', sa.JSON(), nullable=True),
        sa.Column('result_bytes', sa.BigInteger(), nullable=False),
        sa.Column('result_sha256', sa.String(length=64), nullable=True),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(
            ['session_id'], ['sessions.id'], name=op.f('fk_session_operations_session_id')
        ),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_session_operations_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_session_operations_project_id')),
        sa.PrimaryKeyConstraint('session_id', 'position', name=op.f('pk_session_operations')),
        sa.UniqueConstraint('session_id', 'model', 'seq', name=op.f('uq_session_operations_session_id_model_seq')),
    )
    undone = sa.text('done_at IS NULL')
    op.create_index(
        'ix_session_operations_undone',
        'session_operations',
        ['session_id', 'position'],
        sqlite_where=undone,
        postgresql_where=undone,
    )


def downgrade() -> None:
    op.drop_table('session_operations')
    op.drop_table('sessions')
    _lines(OLD)


def _lines(where: dict[str, str]) -> None:
    for what, words in where.items():
        op.drop_index(f'ix_jobs_waits_{what}', 'jobs')
        lines = sa.text(words)
        columns = ['queue_key', 'created_at', 'id']
        op.create_index(f'ix_jobs_waits_{what}', 'jobs', columns, sqlite_where=lines, postgresql_where=lines)
