//! Messages between machines and between an agent and its VM processes, and records, against their golden file.

#[path = "../../store/tests/common/golden.rs"]
mod golden;

use godwit_types::clones::{CloneDisks, ClonedVariables, Cloning};
use godwit_types::console::{ConsolePiece, ConsoleTyped};
use godwit_types::control_api::{
    ConsoleText, DisksMaking, Done, Empty, HostCheck, JoinRequest, JoinResponse, Started,
};
use godwit_types::disk_activity::LimitDisk;
use godwit_types::disk_move::{DiskMoves, MoveDisks};
use godwit_types::disk_resize::ResizeDisk;
use godwit_types::forecast::{
    DirtyRate, LinkMeasured, LinkProbeListen, LinkProbeReady, LinkProbeSend,
};
use godwit_types::host::HostInfo;
use godwit_types::host_api::{
    CloseRequest, HostCancel, HostResolve, HostStop, HostVm, IncomingReady, MigrationNote,
    PeerEnvelope, PreflightIncoming, PreflightOutgoing, PrepareIncoming, ProbeRequest, ProbeResult,
    PutVm, RemovedHosts, Revoked, VmAnswer, VmProcessConfig, VmRequest,
};
use godwit_types::load::HostLoad;
use godwit_types::migration::{MigrateRequest, MigrationReport, MigrationSpec, PreflightReport};
use godwit_types::site::{
    Claim, GiftOvertaken, SiteAnswer, SiteHeard, SiteQuestion, SiteTable, SiteUpdate, SurveyAnswer,
    SurveyRequest, WholeSurvey,
};
use godwit_types::{ApiError, VmSpec};
use golden::{again, check};
use std::path::Path;

#[test]
fn messages_and_records_are_as_their_golden_file_says() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden/messages");
    check(
        &file,
        &[
            ("VmSpec", again::<VmSpec>),
            ("HostInfo", again::<HostInfo>),
            ("HostVm", again::<HostVm>),
            ("HostCheck", again::<HostCheck>),
            ("PutVm", again::<PutVm>),
            ("PrepareIncoming", again::<PrepareIncoming>),
            ("IncomingReady", again::<IncomingReady>),
            ("PreflightIncoming", again::<PreflightIncoming>),
            ("PreflightOutgoing", again::<PreflightOutgoing>),
            ("PreflightReport", again::<PreflightReport>),
            ("PeerEnvelope", again::<PeerEnvelope>),
            ("Claim", again::<Claim>),
            ("VmRequest", again::<VmRequest>),
            ("VmAnswer", again::<VmAnswer>),
            ("VmProcessConfig", again::<VmProcessConfig>),
            ("MigrationNote", again::<MigrationNote>),
            ("MigrationSpec", again::<MigrationSpec>),
            ("MigrateRequest", again::<MigrateRequest>),
            ("MigrationReport", again::<MigrationReport>),
            ("ProbeRequest", again::<ProbeRequest>),
            ("ProbeResult", again::<ProbeResult>),
            ("Revoked", again::<Revoked>),
            ("RemovedHosts", again::<RemovedHosts>),
            ("HostStop", again::<HostStop>),
            ("HostResolve", again::<HostResolve>),
            ("HostCancel", again::<HostCancel>),
            ("CloseRequest", again::<CloseRequest>),
            ("Done", again::<Done>),
            ("DisksMaking", again::<DisksMaking>),
            ("MoveDisks", again::<MoveDisks>),
            ("DiskMoves", again::<DiskMoves>),
            ("ResizeDisk", again::<ResizeDisk>),
            ("LimitDisk", again::<LimitDisk>),
            ("Started", again::<Started>),
            ("CloneDisks", again::<CloneDisks>),
            ("Cloning", again::<Cloning>),
            ("ClonedVariables", again::<ClonedVariables>),
            ("Empty", again::<Empty>),
            ("ConsoleText", again::<ConsoleText>),
            ("ConsolePiece", again::<ConsolePiece>),
            ("ConsoleTyped", again::<ConsoleTyped>),
            ("ApiError", again::<ApiError>),
            ("JoinRequest", again::<JoinRequest>),
            ("JoinResponse", again::<JoinResponse>),
            ("DirtyRate", again::<DirtyRate>),
            ("LinkProbeListen", again::<LinkProbeListen>),
            ("LinkProbeReady", again::<LinkProbeReady>),
            ("LinkProbeSend", again::<LinkProbeSend>),
            ("LinkMeasured", again::<LinkMeasured>),
            ("HostLoad", again::<HostLoad>),
            ("SurveyRequest", again::<SurveyRequest>),
            ("SurveyAnswer", again::<SurveyAnswer>),
            ("GiftOvertaken", again::<GiftOvertaken>),
            ("SiteTable", again::<SiteTable>),
            ("SiteUpdate", again::<SiteUpdate>),
            ("SiteHeard", again::<SiteHeard>),
            ("SiteQuestion", again::<SiteQuestion>),
            ("SiteAnswer", again::<SiteAnswer>),
            ("WholeSurvey", again::<WholeSurvey>),
        ],
    );
}
