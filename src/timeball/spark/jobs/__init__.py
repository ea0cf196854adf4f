"""The jobs of the pipeline: compact, ledger, archive, replay, bulk with its campaigns, and audit."""
