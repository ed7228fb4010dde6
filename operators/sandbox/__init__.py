"""The sandbox operator: warm pools of hardened pods and leases on them. Decisions are pure, handlers are thin."""
