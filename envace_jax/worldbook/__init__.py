"""Trace2Env: from traces to a worldbook and an agentic world model."""
