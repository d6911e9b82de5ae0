"""Webhooks, and what is to be delivered to them"""

import sqlalchemy as sa
from alembic import op

revision = '0007'
down_revision = '0006'
branch_labels = None
depends_on = None

PENDING = "state = 'pending'"


def owned(table):
    return (
        sa.Column('owner_id', sa.String(length=40), nullable=False),
        sa.Column('project_id', sa.String(length=40), nullable=False),
        sa.ForeignKeyConstraint(['owner_id'], ['users.id'], name=op.f(f'fk_{table}_owner_id')),
        sa.ForeignKeyConstraint(['project_id'], ['projects.id'], name=op.f(f'fk_{table}_project_id')),
    )


def upgrade() -> None:
    op.create_table(
        'webhooks',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('name', sa.String(length=100), nullable=False),
        sa.Column('kind', sa.String(length=16), nullable=False),
        sa.Column('url', sa.Text(), nullable=False),
        sa.Column('events', sa.JSON(none_as_null=True), nullable=False),
        sa.Column('all_jobs', sa.Boolean(), nullable=False),
        sa.Column('secrets', sa.JSON(none_as_null=True), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('failing_since', sa.Float(), nullable=True),
        sa.Column('disabled_at', sa.Float(), nullable=True),
        sa.Column('disabled_reason', sa.Text(), nullable=True),
        *owned('webhooks'),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_webhooks')),
    )
    op.create_index('ix_webhooks_project_id_id', 'webhooks', ['project_id', 'id'])
    op.create_table(
        'webhook_deliveries',
        sa.Column('id', sa.String(length=40), nullable=False),
        sa.Column('webhook_id', sa.String(length=40), nullable=False),
        sa.Column('job_id', sa.String(length=40), nullable=True),
        sa.Column('type', sa.String(length=32), nullable=False),
        sa.Column('data', sa.JSON(none_as_null=True), nullable=False),
        sa.Column('created_at', sa.Float(), nullable=False),
        sa.Column('state', sa.String(length=16), nullable=False),
        sa.Column('attempts', sa.Integer(), nullable=False),
        sa.Column('next_at', sa.Float(), nullable=False),
        sa.Column('last_at', sa.Float(), nullable=True),
        sa.Column('last_status', sa.Integer(), nullable=True),
        sa.Column('last_error', sa.Text(), nullable=True),
        *owned('webhook_deliveries'),
        sa.ForeignKeyConstraint(['webhook_id'], ['webhooks.id'], name=op.f('fk_webhook_deliveries_webhook_id')),
        sa.PrimaryKeyConstraint('id', name=op.f('pk_webhook_deliveries')),
    )
    op.create_index('ix_webhook_deliveries_webhook_id_id', 'webhook_deliveries', ['webhook_id', 'id'])
    op.create_index(
        'ix_webhook_deliveries_due',
        'webhook_deliveries',
        ['webhook_id', 'next_at'],
        sqlite_where=sa.text(PENDING),
        postgresql_where=sa.text(PENDING),
    )


def downgrade() -> None:
    op.drop_table('webhook_deliveries')
    op.drop_table('webhooks')
