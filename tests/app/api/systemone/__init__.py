"""Tests of `/v1/systemone`."""
