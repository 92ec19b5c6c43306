"""The one package that the wheel installs: it carries `app` and `batching`, which a checkout has beside it.

Their names are too common for site-packages, so they are modules of the server's process alone.  `__main__` makes
them so; the processes that the server starts run single files, which import nothing of the project.
"""
