"""The pipeline's jobs: compact, ledger, archive, replay, bulk with its campaigns, and audit."""
