"""The pipeline's jobs, one file each: compact, ledger, audit; and the runner that keeps the streaming ones alive."""
