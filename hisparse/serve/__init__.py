"""The Ray Serve app. `import_path: hisparse.serve:build_app`."""

from hisparse.serve.app import build_app

__all__ = ["build_app"]
