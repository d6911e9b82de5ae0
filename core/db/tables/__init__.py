"""The tables. Times are seconds since 1970 by the database's clock; owner and project stand on every owned row.

Import tables from here: SQLAlchemy's metadata only has what was imported, and this module imports all of them. It also
configures the mappers, which the first query would do otherwise: in every member that `eft up` forks, anew.
"""

from sqlalchemy.orm import configure_mappers

from core.db.tables.base import Base, Id, Owned
from core.db.tables.house import Installation, Leader, SchemaFloor
from core.db.tables.jobs import (
    AFTER_OTHERS,
    BOUNDED,
    PREVIEWS,
    QUEUED,
    TRIALS,
    WAITS_FOR,
    Artifact,
    Attempt,
    DeletedJobs,
    Event,
    File,
    Job,
    JobDependency,
    Metric,
    ModelShape,
    OutboxMessage,
)
from core.db.tables.models import RegisteredModel
from core.db.tables.notices import Delivery, Webhook
from core.db.tables.people import ApiKey, Audit, IdempotencyKey, Membership, Project, User
from core.db.tables.pipelines import Pipeline, PipelineEvent, PipelineStep
from core.db.tables.serving import CompletionPiece, CompletionRow, ServingRow
from core.db.tables.sessions import SessionOperation, SessionRow, SessionSave
from core.db.tables.slots import Allocation, Hold, Maintenance, Node, SlotGuest
from core.db.tables.sweeps import SweepRow
from core.db.tables.usage import DiskUsage, Limit, UsageDay, UsageTotal

configure_mappers()

__all__ = [
    "AFTER_OTHERS",
    "BOUNDED",
    "PREVIEWS",
    "QUEUED",
    "TRIALS",
    "WAITS_FOR",
    "Allocation",
    "ApiKey",
    "Artifact",
    "Attempt",
    "Audit",
    "Base",
    "CompletionPiece",
    "CompletionRow",
    "DeletedJobs",
    "Delivery",
    "DiskUsage",
    "Event",
    "File",
    "Hold",
    "Id",
    "IdempotencyKey",
    "Installation",
    "Job",
    "JobDependency",
    "Leader",
    "Limit",
    "Maintenance",
    "Membership",
    "Metric",
    "ModelShape",
    "Node",
    "OutboxMessage",
    "Owned",
    "Pipeline",
    "PipelineEvent",
    "PipelineStep",
    "Project",
    "RegisteredModel",
    "SchemaFloor",
    "ServingRow",
    "SessionOperation",
    "SessionRow",
    "SessionSave",
    "SlotGuest",
    "SweepRow",
    "UsageDay",
    "UsageTotal",
    "User",
    "Webhook",
]
