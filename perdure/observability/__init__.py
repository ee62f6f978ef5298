"""Metrics, logs, traces and redaction: what an operator sees of Perdure.

metrics.Metrics            every Prometheus family of the product
logs.setup_logging         one JSON object a line, clean of secrets
redact.redact              the one place that takes secrets out of text
traces.span                spans, when an OTLP endpoint is set
page.MetricsPage           /metrics and /healthz of a worker
temporal_metrics           the SDK's own metrics on the same page
"""
