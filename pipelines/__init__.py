"""The stages wired into DAGs, and how a DAG runs on this machine."""
