//! placeholder
use super::*;
pub struct DamonTracker;
impl DamonTracker {
    pub fn new(_: &Settings) -> Result<Self, TrackerError> {
        Err(TrackerError::Unavailable {
            tracker: "damon",
            why: "".into(),
            mend: "".into(),
        })
    }
}
impl Tracker for DamonTracker {
    fn name(&self) -> &'static str {
        "damon"
    }
    fn set_targets(&mut self, _: &[Pid]) -> Result<(), TrackerError> {
        Ok(())
    }
    fn drain(&mut self, _: &mut Vec<Sample>, _: usize) -> Result<Drained, TrackerError> {
        Ok(Drained::default())
    }
    fn pause(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }
    fn resume(&mut self) -> Result<(), TrackerError> {
        Ok(())
    }
}
