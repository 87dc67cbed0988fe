"""From run folders to tables, figures and one page.

Run folders, or what was kept of them, come in; Markdown, LaTeX, CSV, figures and ``report.html`` go out. May import
everything left of it (docs/architecture.md), and nothing of claims, speed or the command line.
"""
