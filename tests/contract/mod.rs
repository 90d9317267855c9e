//! What a Burn user may rely on.

mod ordinary_model;
