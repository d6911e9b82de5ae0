"""Models that are served, requests and their answers"""

import sqlalchemy as sa
from alembic import op

revision = '0024'
down_revision = '0023'
branch_labels = None
depends_on = None

KINDS = "kind IN ('train', 'session')"
OLD = {
    'prepare': f"status = 'queued' AND unmet = 0 AND {KINDS} AND prepared IS NULL",
    'train': f"status = 'queued' AND unmet = 0 AND {KINDS} AND prepared IS NOT NULL",
    'bounded': f"status = 'queued' AND unmet = 0 AND {KINDS} AND prepared IS NOT NULL AND bound_seconds IS NOT NULL",
}
NEW = {what: where.replace(KINDS, "kind IN ('train', 'session', 'serving')") for what, where in OLD.items()}


def upgrade() -> None:
    _lines(NEW)
    op.create_table(
        'servings',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('base', sa.String(length=64), nullable=False),
        sa.Column('used_at', sa.Float(), nullable=False),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['id'], ['jobs.id'], name=op.f('fk_servings_id')),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_servings_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_servings_project_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_servings')),
    )
    op.create_index('ix_servings_base', 'servings', ['project_id', 'base'])
    op.create_table(
        'completions',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('serving_id', sa.String(length=40), nullable=False),
        sa.Column('request', sa.JSON(), nullable=False),
        sa.Column('streamed', sa.Boolean(), nullable=False),
        sa.Column('attempt', sa.Integer(), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('seen_at', sa.Float(), nullable=False),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['serving_id'], ['servings.id'], name=op.f('fk_completions_serving_id')),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_completions_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_completions_project_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_completions')),
    )
    op.create_index('ix_completions_serving_id', 'completions', ['serving_id'])
    op.create_table(
        'completion_pieces',
        sa.Column('completion_id', sa.String(length=40), nullable=False),
        sa.Column('number', sa.Integer(), nullable=False),
        sa.Column('content', sa.JSON(), nullable=False),
        sa.ForeignKeyConstraint(
            ['completion_id'], ['completions.id'], name=op.f('fk_completion_pieces_completion_id')
        ),
        sa.PrimaryKeyConstraint('completion_id', 'number', name=op.f('pk_completion_pieces')),
    )


def downgrade() -> None:
    op.drop_table('completion_pieces')
    op.drop_table('completions')
    op.drop_table('servings')
    _lines(OLD)


def _lines(where: dict[str, str]) -> None:
    for what, words in where.items():
        op.drop_index(f'ix_jobs_waits_{what}', 'jobs')
        lines = sa.text(words)
        columns = ['queue_key', 'created_at', 'id']
        op.create_index(f'ix_jobs_waits_{what}', 'jobs', columns, sqlite_where=lines, postgresql_where=lines)
