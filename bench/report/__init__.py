"""From run folders, or their archived tables, to Markdown, LaTeX, CSV, figures and ``report.html``."""
