"""The migrations of a version that does not exist yet: ours, and one more."""

from __future__ import annotations

import shutil
from pathlib import Path

from core.db import migrate

BODY = '''"""What the next version adds"""

import sqlalchemy as sa
from alembic import op

revision = 'next'
down_revision = {down!r}
branch_labels = None
depends_on = None
{more}

def upgrade():
{body}


def downgrade():
    raise NotImplementedError
'''
EXPANDS = """\
    op.add_column('jobs', sa.Column('mood', sa.String(length=8), nullable=False, server_default='calm'))
    op.add_column('events', sa.Column('weight', sa.Float(), nullable=True))
    op.create_table('moods', sa.Column('id', sa.String(length=8), primary_key=True))
    op.create_index('ix_jobs_mood', 'jobs', ['mood', 'id'])
"""


def next_schema(folder: Path, body: str = EXPANDS, more: str = "") -> Path:
    """A folder of migrations whose newest, `next`, does what `body` says."""
    shutil.copytree(migrate.SCRIPTS, folder)  # with its bytecode, so that nothing is compiled again
    text = BODY.format(down=migrate.head(), more=more, body=body.rstrip("\n"))
    (folder / "versions" / "9999_next.py").write_text(text, encoding="utf-8")
    return folder
