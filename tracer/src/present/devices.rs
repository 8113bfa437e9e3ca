//! Devices: how fast they were and for whom they read, and from which of them relations came.

use std::io::{self, Write};

use super::printable::printable;
use super::table::{Column, NOT_MEASURED, known, write_table};
use crate::model::{Device, Dist, FromDevice, Relation, Users};
use crate::units;

/// Devices that are named in the row of a relation.
const DEVICES_SHOWN: usize = 2;

/// Columns of the table of devices. The last three are shares of its bytes: asked for by the server's reads, read ahead for
/// them, and read for others.
const DEVICES: [Column<Device>; 14] = [
    Column::name("DEVICE", |device| device.dev.clone()),
    Column::name("NAME", |device| known(device.name.as_deref().map(|name| printable(name).into_owned()))),
    Column::figure("REQUESTS", |device| units::count(device.requests)),
    Column::figure("SIZE", |device| units::size(device.bytes)),
    Column::figure("MEAN SIZE", mean_size),
    Column::figure("DEPTH", depth),
    Column::figure("QUEUE P50", |device| of(device.block_queue_us, |dist| dist.p50)),
    Column::figure("QUEUE P99", |device| of(device.block_queue_us, |dist| dist.p99)),
    Column::figure("DEVICE P50", |device| of(device.device_us, |dist| dist.p50)),
    Column::figure("DEVICE P99", |device| of(device.device_us, |dist| dist.p99)),
    Column::figure("MAX", |device| of(device.device_us, |dist| dist.max)),
    Column::figure("ASKED", asked),
    Column::figure("AHEAD", |device| {
        known(device.users.readahead_bytes.and_then(|bytes| share(bytes, device.bytes)))
    }),
    Column::figure("OTHERS", |device| known(share(device.users.other_bytes, device.bytes))),
];

/// Writes the table of devices.
pub fn write_devices(out: &mut dyn Write, devices: &[Device]) -> io::Result<()> {
    let title =
        "Devices: all read requests, whoever wanted them; ASKED, AHEAD and OTHERS are shares of the bytes";
    write_table(out, title, &DEVICES, devices)
}

/// The devices that a relation came from, each with its share of the bytes: `vda 71 %, loop0 29 %`, or the only one's
/// name.
pub fn devices_of(relation: &Relation) -> String {
    let Some(devices) = relation.devices.as_deref() else { return NOT_MEASURED.to_owned() };
    if let [device] = devices {
        return device_name(&device.dev, device.name.as_deref());
    }
    let mut by_bytes: Vec<(&FromDevice, u64)> =
        devices.iter().map(|device| (device, device.asked_bytes + device.readahead_bytes)).collect();
    by_bytes.sort_by_key(|(_, bytes)| std::cmp::Reverse(*bytes));
    let total = by_bytes.iter().map(|(_, bytes)| bytes).sum();
    let mut shown: Vec<String> = (by_bytes.iter().take(DEVICES_SHOWN))
        .map(|(device, bytes)| {
            let name = device_name(&device.dev, device.name.as_deref());
            share(*bytes, total).map_or_else(|| name.clone(), |share| format!("{name} {share}"))
        })
        .collect();
    let hidden = by_bytes.len().saturating_sub(DEVICES_SHOWN);
    if hidden > 0 {
        shown.push(format!("{} more", units::count(hidden as u64)));
    }
    if shown.is_empty() { "none".to_owned() } else { shown.join(", ") }
}

/// Bytes of a relation that were read ahead.
pub fn read_ahead(relation: &Relation) -> String {
    let bytes = |devices: &[FromDevice]| devices.iter().map(|device| device.readahead_bytes).sum();
    known(relation.devices.as_deref().map(|devices| units::size(bytes(devices))))
}

/// Mean size of a request.
pub(super) fn mean_size(device: &Device) -> String {
    #[expect(
        clippy::cast_possible_truncation,
        clippy::cast_sign_loss,
        reason = "the mean of sizes is a size: not negative, and far below 2^64"
    )]
    let mean = device.request_bytes.map(|sizes| sizes.mean.round() as u64);
    known(mean.map(units::size))
}

/// Mean and most requests at once. The mean comes from the times with the device.
pub(super) fn depth(device: &Device) -> String {
    let mean = match device.device_us {
        Some(_) if device.depth.mean > 0.0 && device.depth.mean < 0.01 => "<0.01".to_owned(),
        Some(_) => format!("{:.2}", device.depth.mean),
        None => NOT_MEASURED.to_owned(),
    };
    format!("{mean}/{}", device.depth.max)
}

/// Share of the bytes that the server's reads asked for; at most all that the server's processes queued, where readahead
/// is not known.
fn asked(device: &Device) -> String {
    let Users { server_bytes, readahead_bytes, .. } = device.users;
    let asked = server_bytes.saturating_sub(readahead_bytes.unwrap_or(0));
    let bound = if readahead_bytes.is_none() && asked > 0 { "≤" } else { "" };
    known(share(asked, device.bytes).map(|share| format!("{bound}{share}")))
}

/// The kernel's name of a device, or its numbers.
fn device_name(dev: &str, name: Option<&str>) -> String {
    printable(name.unwrap_or(dev)).into_owned()
}

fn share(part: u64, whole: u64) -> Option<String> {
    (whole > 0).then(|| units::percent(part as f64 / whole as f64))
}

fn of(dist: Option<Dist>, figure: fn(&Dist) -> f64) -> String {
    known(dist.map(|dist| units::duration(figure(&dist))))
}

#[cfg(test)]
mod tests {
    use super::super::samples;
    use super::*;

    fn relation(devices: Option<Vec<FromDevice>>) -> Relation {
        Relation { devices, ..samples::full().relations[0].clone() }
    }

    fn from(dev: &str, name: Option<&str>, asked_bytes: u64, readahead_bytes: u64) -> FromDevice {
        let (dev, name) = (dev.to_owned(), name.map(str::to_owned));
        FromDevice { dev, name, requests: 1, asked_bytes, readahead_bytes }
    }

    #[test]
    fn a_relation_names_the_devices_it_came_from() {
        let vda = from("254:0", Some("vda"), 60, 11);
        let loop0 = from("7:0", None, 29, 0);
        assert_eq!(devices_of(&relation(Some(vec![vda.clone()]))), "vda");
        assert_eq!(devices_of(&relation(Some(vec![loop0.clone(), vda.clone()]))), "vda 71 %, 7:0 29 %");
        let many = vec![vda.clone(), loop0, from("7:1", None, 0, 0), from("7:2", None, 0, 0)];
        assert_eq!(devices_of(&relation(Some(many.clone()))), "vda 71 %, 7:0 29 %, 2 more");
        assert_eq!(read_ahead(&relation(Some(many))), "11 B");
        assert_eq!(devices_of(&relation(Some(vec![from("7:1", None, 0, 0); 2]))), "7:1, 7:1");
    }

    #[test]
    fn devices_that_are_not_known_are_not_said_to_be_none() {
        assert_eq!(
            (devices_of(&relation(None)), read_ahead(&relation(None))),
            ("–".to_owned(), "–".to_owned())
        );
        let cached = &samples::full().relations[3];
        assert_eq!((devices_of(cached), read_ahead(cached)), ("none".to_owned(), "0 B".to_owned()));
    }

    #[test]
    fn what_was_not_measured_of_a_device_is_no_zero() {
        let mut device = samples::full().devices.swap_remove(0);
        assert_eq!((depth(&device).as_str(), asked(&device).as_str()), ("1.70/32", "48 %"));
        device.depth.mean = 0.001;
        assert_eq!(depth(&device), "<0.01/32");
        device.device_us = None;
        device.users.readahead_bytes = None;
        device.request_bytes = None;
        assert_eq!(depth(&device), "–/32");
        assert_eq!((asked(&device).as_str(), mean_size(&device).as_str()), ("≤63 %", "–"));
    }
}
