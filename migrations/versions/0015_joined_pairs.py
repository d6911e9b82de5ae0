"""Jobs that have begun keep their tokens: pairs stay joined. A limit that is infinite becomes none"""

import json

import sqlalchemy as sa
from alembic import op

revision = '0015'
down_revision = '0014'
branch_labels = None
depends_on = None

PAGE = 200
LARGEST = 1.7976931348623157e308


def upgrade() -> None:
    _join_pairs()
    # What no float is larger than is infinity, and on PostgreSQL NaN.
    op.execute(f'UPDATE limits SET gpu_hours_week = NULL WHERE gpu_hours_week > {LARGEST}')
    op.execute(f'UPDATE limits SET shares = 1000000 WHERE shares > {LARGEST}')  # the most that may be set


def downgrade() -> None:
    pass  # the version before reads both


def _join_pairs() -> None:
    """Versions before this one joined the strings of a pair and stored no `pairs`. What goes on from a checkpoint of
    theirs goes on with the same tokens; a job that has not begun takes the new default."""
    connection = op.get_bind()
    jobs = sa.table(
        'jobs',
        sa.column('id', sa.String),
        sa.column('project_id', sa.String),
        sa.column('kind', sa.String),
        sa.column('status', sa.String),
        sa.column('spec', sa.JSON),
        sa.column('furthest_step', sa.Integer),
        sa.column('resume_from', sa.JSON),
    )
    projects = sa.table('projects', sa.column('id', sa.String), sa.column('spec_bytes', sa.BigInteger))
    attempts = sa.table('attempts', sa.column('job_id', sa.String), sa.column('kind', sa.String))
    attempted = sa.exists().where(attempts.c.job_id == jobs.c.id, attempts.c.kind == 'train')
    begun = sa.or_(attempted, jobs.c.furthest_step > 0).label('begun')
    last = ''
    while True:
        page = connection.execute(
            sa.select(jobs.c.id, jobs.c.project_id, jobs.c.spec, jobs.c.resume_from, begun)
            .where(jobs.c.kind == 'train', jobs.c.status != 'succeeded', jobs.c.id > last)
            .order_by(jobs.c.id)
            .limit(PAGE)
        ).all()
        for job_id, project_id, spec, resume_from, has_begun in page:
            last = job_id
            if not (has_begun or resume_from):
                continue
            rendering = spec['data'].get('rendering') or {'type': 'model'}
            if 'pairs' in rendering:
                continue
            joined = spec | {'data': spec['data'] | {'rendering': rendering | {'pairs': 'joined'}}}
            connection.execute(jobs.update().where(jobs.c.id == job_id).values(spec=joined))
            more = len(json.dumps(joined)) - len(json.dumps(spec))
            counted = projects.c.spec_bytes + more
            connection.execute(projects.update().where(projects.c.id == project_id).values(spec_bytes=counted))
        if len(page) < PAGE:
            return
