"""Encoders and cross-encoders: BERT, XLM-R, ModernBERT."""
