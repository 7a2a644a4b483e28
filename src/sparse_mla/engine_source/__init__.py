"""An engine's source, read as syntax trees and judged without running any of it; what doctor and the plugin both ask."""

from __future__ import annotations
