"""The model registry, with the models of the jobs that have succeeded"""

import sqlalchemy as sa
from alembic import op

revision = '0018'
down_revision = '0017'
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        'models',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('name', sa.String(length=100), nullable=True),
        sa.Column('kind', sa.String(length=16), nullable=False),
        sa.Column('job_id', sa.String(length=40), nullable=False),
        sa.Column('tags', sa.JSON(), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f('fk_models_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f('fk_models_project_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_models')),
    )
    op.create_index(op.f('ix_models_project_id_id'), 'models', ['project_id', 'id'])
    op.create_index(op.f('ix_models_job_id'), 'models', ['job_id'])
    for kind in ('adapter', 'model'):
        op.execute(
            f"""
            INSERT INTO models (id, name, kind, job_id, tags, created_at, owner_id, project_id)
            SELECT 'model-' || substr(jobs.id, 5), jobs.name, '{kind}', jobs.id, '[]',
                   coalesce(jobs.finished_at, jobs.created_at), jobs.owner_id, jobs.project_id
            FROM jobs
            WHERE jobs.kind = 'train' AND jobs.status = 'succeeded' AND EXISTS (
                SELECT 1 FROM artifacts
                WHERE artifacts.job_id = jobs.id AND artifacts.path LIKE '{kind}/%.safetensors'
            ) AND NOT EXISTS (SELECT 1 FROM models WHERE models.job_id = jobs.id)
            """
        )


def downgrade() -> None:
    op.drop_table('models')
