//! Records and map keys that both sides share.
#![no_std]
