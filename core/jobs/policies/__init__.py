"""The rules that people set: quotas, holds, maintenance, retention, budgets, and the audit trail."""
