"""From run folders to tables, figures and one page.

Run folders or their archived tables come in; Markdown, LaTeX, CSV, figures and ``report.html`` go out. This folder may
import every folder left of it (CONTRIBUTING.md), but not the command line.
"""
