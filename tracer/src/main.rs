//! tmp
use pgiotrace::capture::kernel::{programs::Phase, *};
use std::time::Instant;
#[tokio::main(flavor = "current_thread")]
async fn main() {
    let t = Instant::now();
    let mut k = Kernel::load(Sizes { processes: 200, handles: 1000, ring_bytes: 8 << 20 }).unwrap();
    eprintln!("loaded {:?}", t.elapsed());
    for p in [Phase::Processes, Phase::Ends, Phase::Begins] {
        for o in k.attach_phase(p) {
            match &o.result {
                Ok(a) => println!("{}: {:?} {}", o.program.name, a.alternative.kind, a.alternative.program),
                Err(e) => println!("{}: {e} ", o.program.name),
            };
            k.keep(vec![o]).ok();
        }
    }
    eprintln!("attached {:?}", t.elapsed());
}
